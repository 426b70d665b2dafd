// A button that copies text.

import { element } from "./element.js";

const SHOWN_MS = 2000;

/** A button that copies what `text()` returns when it is pressed. */
export function copyButton(text) {
  const button = element("button", "small", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), SHOWN_MS);
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  // Browsers have no clipboard for pages from other computers without TLS.
  const field = element("textarea", "unseen");
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  return copied;
}
