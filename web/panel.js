// The extension: its texts, its styles, and the nodes it is about.

import { app } from "../../scripts/app.js"
import { setHints } from "./inputs.js"
import { attach } from "./nodes.js"
import { refresh, watch } from "./paint.js"
import { getJson, graphChanged } from "./runs.js"
import { REPORT_NODE, SOURCES, panels, texts } from "./state.js"

function setLocale() {
  texts.locale = app.extensionManager?.setting?.get("Comfy.Locale") ?? document.documentElement.lang
  for (const node of panels.keys()) setHints(node, texts.t)
  refresh()
}

async function loadTexts() {
  try {
    texts.load(await getJson("/i18n"))
  } catch {
    // The English texts are built in.
  }
  setLocale()
}

function loadStyle() {
  const link = document.createElement("link")
  link.rel = "stylesheet"
  link.href = new URL("./panel.css", import.meta.url).href
  document.head.append(link)
}

app.registerExtension({
  name: "moss.fp16.panel",
  init: loadStyle,
  async setup() {
    app.ui?.settings?.addEventListener?.("Comfy.Locale.change", setLocale)
    watch()
    await loadTexts()
  },
  nodeCreated(node) {
    if (SOURCES.has(node.comfyClass) || node.comfyClass === REPORT_NODE) attach(node)
  },
  loadedGraphNode: refresh,
  afterConfigureGraph: graphChanged,
})
