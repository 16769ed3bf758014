// One toast a run: the gravest thing the server had to say about it. What comes first gives way to what is worse.

import { normaliseMessage } from "./report.js"

/** What a notice is about, the gravest first; a kind that is not here ranks by its severity. */
const GRAVEST = ["black_image", "input_fault", "self_check", "out_of_range", "rescue", "no_fix"]
const BY_SEVERITY = { error: 1, warn: 4, info: 6 }
const SECONDS = { error: 20, warn: 12, info: 6 }
const KEPT = 100

const rankOf = (kind, severity) => (GRAVEST.includes(kind) ? GRAVEST.indexOf(kind) : BY_SEVERITY[severity])

export class Toasts {
  #shown = new Map() // prompt id -> {rank, toast}

  /** `show(toast, id)` and `remove(toast, id)` put a toast on the page and take it off; `texts` gives t and say. */
  constructor(texts, { show, remove }) {
    Object.assign(this, { texts, show, remove })
  }

  /** A notice off the wire: {prompt_id, kind, severity, text, key, values, sticky, remedy}. */
  notice(raw) {
    const message = normaliseMessage(raw)
    const detail = this.#detail(message)
    if (detail === "") return
    const severity = typeof raw.severity === "string" && raw.severity in SECONDS ? raw.severity : "info"
    const kind = String(raw.kind)
    const promptId = String(raw.prompt_id)
    const rank = rankOf(kind, severity)
    const before = this.#shown.get(promptId)
    if (before && before.rank <= rank) return
    const id = `moss-fp16-${promptId}`
    if (before) this.remove(before.toast, id)
    const toast = { severity, summary: this.texts.t(title(kind, severity)), detail }
    if (raw.sticky !== true) toast.life = SECONDS[severity] * 1000
    this.#shown.set(promptId, { rank, toast })
    if (this.#shown.size > KEPT) this.#shown.delete(this.#shown.keys().next().value)
    this.show(toast, id)
  }

  /** What the title does not say yet. */
  #detail(message) {
    const { t, say } = this.texts
    const { cause, remedy } = message.values
    if (message.key !== "black_image" || !cause?.key) return say(message)
    return t("toast.because", { cause: say(cause), remedy: remedy?.key ? say(remedy) : "" }).trim()
  }
}

function title(kind, severity) {
  if (kind === "black_image") return "toast.black"
  if (kind === "rescue") return "toast.rescued"
  if (severity === "error") return "toast.error"
  return severity === "warn" ? "toast.warn" : "toast.title"
}

/** The page's toasts: by id where the frontend knows ids, else as one object that is added and removed. */
export const onPage = (manager) => ({
  show(toast, id) {
    const kind = { error: "error", warn: "warning", info: "info" }[toast.severity]
    const page = manager()
    if (page?.dismiss && page[kind]) page[kind](toast.summary, { id, description: toast.detail, duration: toast.life, closable: true })
    else page?.add?.(toast)
  },
  remove(toast, id) {
    const page = manager()
    if (page?.dismiss) page.dismiss(id)
    else page?.remove?.(toast)
  },
})
