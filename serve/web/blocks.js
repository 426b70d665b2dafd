// Text of an answer, laid out: fences of Markdown make code blocks. All of it stays text.

import { copyButton } from "./copy.js";
import { element } from "./element.js";

// CommonMark 0.31, section 4.5: up to three spaces, three or more of a sign, and no backtick after backticks.
const OPENS = /^ {0,3}(?:(`{3,})([^`]*)|(~{3,})(.*))$/;
const CLOSES = /^ {0,3}(`{3,}|~{3,})[ \t]*$/;
const MAY_BE_FENCE = /^ {0,3}(`{0,2}|~{0,2}|`{3,}[^`]*|~{3,}.*)$/; // a line that is not complete

export class Blocks {
  #text;
  #code = null; // the element of the open block
  #fence = ""; // which opened it
  #held = []; // pieces of a line that may still be a fence
  #inLine = false; // whether the line is known to be no fence

  /** Lay out in an element. */
  constructor(text) {
    this.#text = text;
  }

  /** Take a piece of text and the function that makes its element: `make(text)`. */
  push(text, make) {
    for (const part of text.split(/(?<=\n)/)) {
      this.#held.push({ text: part, make });
      const line = this.#line;
      if (part.endsWith("\n")) this.#endLine(line.slice(0, -1));
      else if (this.#inLine || !MAY_BE_FENCE.test(line)) this.#inLine = this.#release();
    }
  }

  /** No more text comes. */
  close() {
    this.#endLine(this.#line);
  }

  get #line() {
    return this.#held.map(({ text }) => text).join("");
  }

  #endLine(line) {
    if (this.#inLine || !(this.#code ? this.#closes(line) : this.#opens(line))) this.#release();
    this.#held = [];
    this.#inLine = false;
  }

  #release() {
    (this.#code ?? this.#text).append(...this.#held.map(({ text, make }) => make(text)));
    this.#held = [];
    return true;
  }

  #opens(line) {
    const found = OPENS.exec(line);
    if (!found) return false;
    this.#fence = found[1] ?? found[3];
    const code = element("code", "");
    const bar = element("div", "code-bar quiet");
    bar.append(element("span", "", (found[2] ?? found[4]).trim()), copyButton(() => code.textContent));
    const pre = element("pre", "");
    pre.append(code);
    const block = element("div", "code");
    block.append(bar, pre);
    this.#text.append(block);
    this.#code = code;
    return true;
  }

  #closes(line) {
    const found = CLOSES.exec(line)?.[1] ?? "";
    if (found[0] !== this.#fence[0] || found.length < this.#fence.length) return false;
    this.#code = null;
    return true;
  }
}
