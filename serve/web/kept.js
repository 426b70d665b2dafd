// What the browser keeps of a conversation when the page is left or loaded again. The API key is never part of it.

const NAME = "conversation";
const FORM = 1; // of what is kept; another form is not read

/** Keep a conversation: {exchanges, ...}. Where the browser has too little room, the oldest exchanges are left out. */
export function keep(conversation) {
  for (let exchanges = conversation.exchanges; ; exchanges = exchanges.slice(1)) {
    try {
      localStorage.setItem(NAME, JSON.stringify({ ...conversation, exchanges, form: FORM }));
      return;
    } catch (error) {
      if (error.name !== "QuotaExceededError" || !exchanges.length) return; // nothing can be kept here
    }
  }
}

/** What was kept; null for nothing. */
export function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME));
    return found?.form === FORM ? found : null;
  } catch {
    return null; // no storage, or text of something else
  }
}

/** Keep nothing any more. */
export function forget() {
  try {
    localStorage.removeItem(NAME);
  } catch {
    // no storage, so nothing is kept
  }
}
