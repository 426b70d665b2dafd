// Dark or light: the system's preference until somebody chooses. Runs before the first paint.
"use strict";
{
  const root = document.documentElement;
  const chosen = localStorage.getItem("theme");
  if (chosen) root.dataset.theme = chosen;
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
      root.dataset.theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
      localStorage.setItem("theme", root.dataset.theme);
    });
  });
}
