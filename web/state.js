// What the parts of the page share: the reports heard of, the texts, and the panels there are.

import { Texts } from "./i18n.js"
import { ReportStore } from "./store.js"

export const SOURCES = new Set(["MossFP16Loader", "MossFP16Fix"])
export const REPORT_NODE = "MossFP16Report"
export const store = new ReportStore()
export const texts = new Texts()
/** node on a graph -> {view, inputs} */
export const panels = new Map()

/** Whether nodes are drawn by Nodes 2.0, not on the classic canvas. */
export const vueNodes = () => globalThis.LiteGraph?.vueNodesMode === true
