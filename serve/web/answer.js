// One prompt and its answer on the page.

import { Calls } from "./calls.js";
import { element } from "./element.js";
import { Meter, Origins } from "./tokens.js";

const ENDS = {
  stop: "finished",
  length: "length limit reached",
  timeout: "out of time",
  abort: "ended by the server",
  tool_calls: "waits for results",
};

const LOOKS = { chat: "", text: "verbatim" };

export class Answer {
  text = "";
  calls = new Calls();
  waits = false; // for the results of its calls
  #body = element("div", "text");
  #figures = element("p", "figures quiet");
  #thought = null;
  #origins = new Origins();
  #meter = new Meter(performance.now());
  #drafts = null; // the server's count of them, at the end
  #end = "";

  constructor(log, mode) {
    this.element = element("article", `answer ${LOOKS[mode]}`);
    this.element.setAttribute("aria-label", "Answer");
    this.element.setAttribute("aria-busy", "true"); // read out once, at its end
    this.element.append(this.#body, this.calls.element, this.#figures);
    log.append(this.element);
  }

  /** Take a chunk of the stream. */
  push(chunk) {
    const speculation = chunk.metrics?.speculative_decoding;
    if (speculation) this.#drafts = speculation;
    for (const choice of chunk.choices) {
      const tokens = choice.token_origins ?? [];
      this.#origins.push(tokens);
      this.#meter.push(tokens, performance.now());
      if (choice.delta?.reasoning) this.#show(choice.delta.reasoning, this.#thoughts());
      const text = choice.delta?.content ?? choice.text ?? "";
      if (text) this.#fold();
      this.#show(text, this.#body);
      this.text += text;
      for (const part of choice.delta?.tool_calls ?? []) {
        this.#fold();
        this.#show(part.function.arguments, this.calls.push(part));
      }
      this.waits ||= choice.finish_reason === "tool_calls";
      if (choice.finish_reason) this.#end = ENDS[choice.finish_reason] ?? choice.finish_reason;
    }
    this.#measure();
  }

  /** Nothing more will come; ``why`` if not for a reason that the stream gave. */
  close(why = "") {
    this.#end = why || this.#end;
    this.element.removeAttribute("aria-busy");
    this.#measure();
  }

  /** It failed, in the server's words. */
  fail(message) {
    const shown = element("p", "error", message);
    shown.setAttribute("role", "alert");
    this.#figures.before(shown);
  }

  #show(text, where) {
    if (!text) return;
    for (const piece of this.#origins.take(text)) {
      const span = element("span", piece.drafted ? "drafted" : "", piece.text);
      if (piece.id !== undefined) span.title = `token ${piece.id}, ${piece.drafted ? "drafted" : "not drafted"}`;
      where.append(span);
    }
  }

  /** Where thoughts go: open while the model thinks, folded once it answers. */
  #thoughts() {
    if (!this.#thought) {
      this.#thought = element("details", "thought");
      this.#thought.open = true;
      this.#thought.append(element("summary", "", "Thinking"), element("div", "text"));
      this.#body.before(this.#thought);
    }
    return this.#thought.lastChild;
  }

  #fold() {
    if (this.#thought && !this.text) {
      this.#thought.open = false;
      this.#thought.firstChild.textContent = "Thought";
    }
  }

  #measure() {
    const meter = this.#meter;
    const figures = [
      [meter.tokens || null, (n) => `${n} token${n === 1 ? "" : "s"}`],
      [meter.rate, (rate) => `${rate.toFixed(1)} tokens/s`],
      [meter.firstAfter, (ms) => `first token after ${ms.toFixed(0)} ms`],
      [meter.acceptanceLength, (length) => `acceptance length ${length.toFixed(2)}`],
      [this.#drafts, (d) => `${d.num_accepted_draft_tokens} of ${d.num_draft_tokens} drafts accepted`],
      [this.#end || null, (end) => end],
    ];
    const known = figures.filter(([value]) => value !== null);
    this.#figures.textContent = known.map(([value, text]) => text(value)).join(" · ");
  }
}

/** What was sent: a prompt, or the result of a call. */
export function promptElement(text, mode, label = "Prompt") {
  const made = element("article", `prompt text ${LOOKS[mode]}`, text);
  made.setAttribute("aria-label", label);
  return made;
}
