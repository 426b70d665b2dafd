// Elements of the page. Whatever a model or a user wrote becomes text, never markup.

export function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}
