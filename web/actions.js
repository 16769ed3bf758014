// Copy and save: the report as it came from the server, as indented JSON.

export const toJson = (report) => `${JSON.stringify(report.raw, null, 2)}\n`

/** A file name without anything a file system would mind. */
export function fileName(report, promptId) {
  const part = (value) => String(value ?? "").replace(/[^A-Za-z0-9]+/g, "-").slice(0, 16)
  return ["moss-report", part(report.nodeId), part(promptId).slice(0, 8)].filter((p) => p && p !== "-").join("-") + ".json"
}

/** Puts text on the clipboard. ComfyUI is often served over plain http, where the clipboard API does not exist. */
export async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) {
    try {
      await navigator.clipboard.writeText(text)
      return true
    } catch {
      // Not allowed right now: the older way below may still be.
    }
  }
  const area = document.createElement("textarea")
  area.value = text
  area.style.cssText = "position:fixed;opacity:0"
  const before = document.activeElement
  document.body.append(area)
  area.select()
  try {
    return document.execCommand("copy")
  } finally {
    area.remove()
    before?.focus?.()
  }
}

export function save(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }))
  const link = document.createElement("a")
  link.href = url
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(url), 10_000)
}
