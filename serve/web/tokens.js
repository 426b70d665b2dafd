// Tokens of an answer: which of its characters were drafted, and what they say of its speed.

const TAG = /^\s*<\/?think>/; // around thoughts: in the tokens, but not in what is shown

/** Gives shown text the origins of the tokens it came from. */
export class Origins {
  #waiting = []; // tokens, or the rest of one, whose text has not been shown

  /** Add tokens: {id, text, drafted}. */
  push(tokens) {
    this.#waiting.push(...tokens);
  }

  /** The text as pieces of one token each; a piece without a token has only its text. */
  take(text) {
    if (!this.#skipTo(text)) return [{ text }];
    const pieces = [];
    for (let left = text.length; left > 0; ) left -= this.#cut(left, pieces);
    return pieces;
  }

  #skipTo(text) {
    const all = this.#waiting.map((token) => token.text).join("");
    let at = all.indexOf(text, TAG.exec(all)?.[0].length ?? 0);
    if (at < 0) at = all.indexOf(text);
    for (let left = at; left > 0; ) left -= this.#cut(left, []);
    return at >= 0;
  }

  #cut(most, pieces) {
    const token = this.#waiting.shift();
    const text = token.text.slice(0, most);
    if (text) pieces.push({ ...token, text });
    if (text.length < token.text.length) this.#waiting.unshift({ ...token, text: token.text.slice(most) });
    return text.length;
  }
}

/** Measures an answer while it comes. Times are milliseconds since it was asked for. */
export class Meter {
  tokens = 0;
  #written = 0; // tokens that were not drafted: the first, and one per step
  #endsDrafted = false;
  #first = null;
  #inFirst = 0;
  #last = 0;

  /** Count tokens that came at a time. */
  push(tokens, now) {
    if (!tokens.length) return;
    this.tokens += tokens.length;
    this.#written += tokens.filter((token) => !token.drafted).length;
    this.#endsDrafted = tokens.at(-1).drafted;
    if (this.#first === null) [this.#first, this.#inFirst] = [now, tokens.length];
    this.#last = now;
  }

  /** Milliseconds to the first token; null before it. */
  get firstAfter() {
    return this.#first;
  }

  /** Tokens that were drafted. */
  get drafted() {
    return this.tokens - this.#written;
  }

  /** Tokens per second since the first; null until there are some. */
  get rate() {
    const seconds = (this.#last - this.#first) / 1000;
    return seconds > 0 ? (this.tokens - this.#inFirst) / seconds : null;
  }

  /** Tokens per step, the prefill's one aside; null before a step. The last step may have been cut short. */
  get acceptanceLength() {
    const steps = this.#written - 1 + (this.#endsDrafted ? 1 : 0);
    return steps > 0 ? (this.tokens - 1) / steps : null;
  }
}
