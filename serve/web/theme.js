// Dark or light: the system's preference until somebody chooses. Runs before the first paint.
"use strict";
{
  const root = document.documentElement;
  // Where the browser keeps nothing for pages, a choice holds until the page is left.
  const kept = (use) => {
    try {
      return use(localStorage);
    } catch {
      return null;
    }
  };
  const chosen = kept((storage) => storage.getItem("theme"));
  if (chosen) root.dataset.theme = chosen;
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
      root.dataset.theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
      kept((storage) => storage.setItem("theme", root.dataset.theme));
    });
  });
}
