// One prompt and its answer on the page.

import { Blocks } from "./blocks.js";
import { Calls } from "./calls.js";
import { copyButton } from "./copy.js";
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
  record = { label: "", chunks: [], why: "", error: "" }; // what an equal answer is made of: [milliseconds, chunk]
  #said = ""; // all that it shows: thoughts, text and calls
  #started = performance.now();
  #body = element("div", "text");
  #blocks;
  #figures = element("p", "figures quiet");
  #actions = element("div", "actions");
  #thought = null;
  #origins = new Origins();
  #meter = new Meter();
  #drafts = null; // the server's count of them, at the end
  #end = "";

  constructor(place, mode, label = "Answer") {
    this.element = element("article", `answer ${LOOKS[mode]}`);
    this.record.label = label;
    this.element.setAttribute("aria-label", label);
    this.element.setAttribute("aria-busy", "true"); // read out once, at its end
    this.#blocks = mode === "chat" ? new Blocks(this.#body) : null;
    this.#actions.append(copyButton(() => this.text));
    this.element.append(this.#body, this.calls.element, this.#figures, this.#actions);
    place.append(this.element);
  }

  /** The answer that a record tells of. */
  static from(record, place, mode) {
    const made = new Answer(place, mode, record.label);
    for (const [at, chunk] of record.chunks) made.push(chunk, at);
    if (record.error) made.fail(record.error);
    made.close(record.why || (made.#end ? "" : "interrupted"));
    return made;
  }

  /** Offer something to do with the answer. */
  offer(button) {
    this.#actions.append(button);
  }

  /** Take a chunk of the stream, which came `at` milliseconds after it was asked for. */
  push(chunk, at = performance.now() - this.#started) {
    this.record.chunks.push([at, kept(chunk)]);
    const speculation = chunk.metrics?.speculative_decoding;
    if (speculation) this.#drafts = speculation;
    for (const choice of chunk.choices) {
      const tokens = choice.token_origins ?? [];
      this.#origins.push(tokens);
      this.#meter.push(tokens, at);
      if (choice.delta?.reasoning) this.#show(choice.delta.reasoning, this.#thoughts());
      const text = choice.delta?.content ?? choice.text ?? "";
      if (text) this.#fold();
      this.#show(text, this.#body, this.#blocks);
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
    this.record.why = why;
    this.#end = why || this.#end;
    this.#blocks?.close();
    this.element.removeAttribute("aria-busy");
    this.#measure();
  }

  /** It failed, in the server's words. */
  fail(message) {
    this.record.error = message;
    const shown = element("p", "error", message);
    shown.setAttribute("role", "alert");
    this.#figures.before(shown);
  }

  /** Parts of the request had no effect, in the server's words. */
  warn(names) {
    this.#figures.before(element("p", "quiet", `Without effect on this model: ${names}`));
  }

  /** What it has over the same without drafts, in words; empty if one was cut. Rates of two texts say nothing. */
  over(other) {
    if (this.record.why || other.record.why) return "";
    if (this.#said !== other.#said) return "The texts differ, as rounding can make them, so their rates are not compared";
    if (!this.#meter.rate || !other.#meter.rate) return "The same text";
    return `With MTP: ${(this.#meter.rate / other.#meter.rate).toFixed(2)} times the tokens/s, the same text`;
  }

  #show(text, where, blocks = null) {
    if (!text) return;
    this.#said += text;
    for (const piece of this.#origins.take(text)) {
      const make = (part) => {
        const span = element("span", piece.drafted ? "drafted" : "", part);
        if (piece.id !== undefined) span.title = `token ${piece.id}, ${piece.drafted ? "drafted" : "not drafted"}`;
        return span;
      };
      if (blocks) blocks.push(piece.text, make);
      else where.append(make(piece.text));
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
    const drafts = this.#drafts?.num_draft_tokens ? this.#drafts : null;
    // Without drafts there is nothing to accept. Until the server has counted them, they show by the tokens.
    const drafting = this.#drafts ? drafts !== null : meter.drafted > 0;
    const figures = [
      [meter.tokens || null, (n) => `${n} token${n === 1 ? "" : "s"}`],
      [meter.rate, (rate) => `${rate.toFixed(1)} tokens/s`],
      [meter.firstAfter, (ms) => `first token after ${ms.toFixed(0)} ms`],
      [drafting ? meter.acceptanceLength : null, (length) => `acceptance length ${length.toFixed(2)}`],
      [drafts, (d) => `${d.num_accepted_draft_tokens} of ${d.num_draft_tokens} drafts accepted`],
      [this.#end || null, (end) => end],
    ];
    const known = figures.filter(([value]) => value !== null);
    this.#figures.textContent = known.map(([value, text]) => text(value)).join(" · ");
  }
}

/** What `push` reads of a chunk. */
function kept({ choices, metrics }) {
  const drafts = metrics?.speculative_decoding;
  return {
    choices: choices.map(({ delta, text, token_origins, finish_reason }) => {
      const said = delta && { reasoning: delta.reasoning, content: delta.content, tool_calls: delta.tool_calls };
      return { delta: said, text, token_origins, finish_reason };
    }),
    metrics: drafts && {
      speculative_decoding: {
        num_accepted_draft_tokens: drafts.num_accepted_draft_tokens,
        num_draft_tokens: drafts.num_draft_tokens,
      },
    },
  };
}

/** What was sent: a prompt, or the result of a call. */
export function promptElement(text, mode, label = "Prompt") {
  const made = element("article", `prompt text ${LOOKS[mode]}`, text);
  made.setAttribute("aria-label", label);
  return made;
}
