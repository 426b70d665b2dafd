// Calls of tools in an answer: what is called with what, and a field for what came of it.

import { element } from "./element.js";

export class Calls {
  element = element("div", "calls");
  #all = []; // {id, name, arguments}, as the answer numbers them
  #form = null;

  /** Take what is new of a call; returns the element that its arguments go to. */
  push({ index, id, function: called }) {
    if (!this.#all[index]) {
      this.#all[index] = { id, name: called.name, arguments: "" };
      const shown = element("section", "call");
      shown.setAttribute("aria-label", "Call");
      shown.append(element("code", "", called.name), element("div", "text"));
      this.element.append(shown);
    }
    this.#all[index].arguments += called.arguments ?? "";
    return this.element.children[index].lastChild;
  }

  /** As a message of the assistant has them. */
  get asSent() {
    return this.#all.map(({ id, ...called }) => ({ id, type: "function", function: called }));
  }

  /** Ask the user for the results; `take` gets them as messages. */
  ask(take) {
    this.#form = element("form", "results");
    const fields = this.#all.map(({ name }) => {
      const label = element("label", "", `Result of ${name}`);
      const field = element("textarea", "");
      label.append(field);
      this.#form.append(label);
      return field;
    });
    this.#form.append(element("button", "primary", "Send results"));
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      take(this.#all.map(({ id }, i) => ({ role: "tool", tool_call_id: id, content: fields[i].value })));
    });
    this.element.append(this.#form);
  }

  /** Ask no longer: the conversation has gone on. */
  settle() {
    this.#form?.remove();
  }
}
