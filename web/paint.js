// Which panel shows what: each its own report, or that of the node whose runs it is about; repainted when that changes.

import { app } from "../../scripts/app.js"
import * as graph from "./graph.js"
import { remedyOf } from "./remedy.js"
import { REPORT_NODE, SOURCES, panels, store, texts, vueNodes } from "./state.js"

const FAR_ZOOM = 0.55
const LOOK_EVERY = 250 // ms

let pending = false

/** Repaints every panel in the next frame, however many messages came in before it. */
export function refresh() {
  if (pending) return
  pending = true
  requestAnimationFrame(() => {
    pending = false
    paintAll()
  })
}

/** A node that left its graph has no panel any more, and a panel that cannot be painted keeps no other from it. */
function paintAll() {
  const reporters = reportersOf()
  for (const [node, panel] of [...panels]) {
    if (!node.graph) drop(node)
    else guarded(node, () => paint(node, panel, reporters), (error) => panel.view.fail(texts.t("note.broken", { error })))
  }
}

const said = new Set()

/** What `act` gives; where it throws that is logged once, and `otherwise` is called. */
function guarded(node, act, otherwise = () => {}) {
  try {
    return act()
  } catch (error) {
    const what = `${node.comfyClass}: ${error}`
    if (!said.has(what)) console.error("[MOSS FP16] A panel could not be painted:", error)
    said.add(what)
    otherwise(error)
    return undefined
  }
}

/** source node -> the report nodes that show its runs. */
function reportersOf() {
  const root = graph.rootGraph(app)
  const found = new Map()
  for (const node of panels.keys()) {
    if (node.comfyClass !== REPORT_NODE || !node.graph || graph.aside(node)) continue
    const source = guarded(node, () => graph.modelSource(root, node, SOURCES))
    if (source) found.set(source, [...(found.get(source) ?? []), node])
  }
  return found
}

function viewOf(node) {
  const root = graph.rootGraph(app)
  const workflow = graph.workflowId(app)
  return workflow && node.graph ? store.view(workflow, graph.executionIds(root, node)) : store.view("", [])
}

/** Whose report a node shows: its own; where it has none, that of the node its runs go through or end in. */
function shownOf(node, reporters = reportersOf()) {
  const own = viewOf(node)
  const has = own.report || own.refusal
  if (node.comfyClass === REPORT_NODE) {
    const source = graph.modelSource(graph.rootGraph(app), node, SOURCES)
    const other = source ? viewOf(source) : null
    const newer = other?.promptId !== own.promptId && other?.order > own.order // a run that was queued elsewhere
    if (other?.report && (!has || newer)) return { view: other, from: source.title, live: other.phase === "running" }
  } else if (!has) {
    const ids = graph.executionIds(graph.rootGraph(app), node)
    for (const reporter of reporters.get(node) ?? []) {
      const other = viewOf(reporter)
      if (other.report && ids.includes(other.report.nodeId)) return { view: other, from: reporter.title }
    }
  }
  return { view: own }
}

function paint(node, { view, inputs }, reporters) {
  view.root.dataset.nodeId = node.id
  const { view: found, from = "", live = false } = shownOf(node, reporters)
  const aside = graph.aside(node)
  const shown = { ...found, aside, reporter: node.comfyClass === REPORT_NODE, errorNode: failedElsewhere(node, found) }
  view.render(shown, {
    from,
    live,
    reported: reporters.has(node),
    remedy: remedyOf(node, shown.report),
    advanced: advancedOf(inputs),
  })
}

/** The title of the node that failed, where it is another one. */
function failedElsewhere(node, { errorNode }) {
  const root = graph.rootGraph(app)
  if (!errorNode || graph.executionIds(root, node).includes(String(errorNode))) return ""
  return graph.nodeOf(root, errorNode)?.title ?? ""
}

/** What changes from outside without a message is looked at a few times a second: zoom, mute, links, a widget's value. */
export function watch() {
  let before = ""
  setInterval(() => {
    const far = isFar()
    for (const { view } of panels.values()) view.root.classList.toggle("moss-far", far)
    const now = [...panels].map(([node, panel]) => signature(node, panel)).join()
    if (now !== before) refresh()
    before = now
  }, LOOK_EVERY)
}

function signature(node, { inputs }) {
  return guarded(node, () => {
    inputs.settle()
    inputs.showFault(app.lastNodeErrors?.[node.id]?.errors)
    const source = node.comfyClass === REPORT_NODE ? graph.modelSource(graph.rootGraph(app), node, SOURCES) : node
    const fix = source?.widgets?.find((widget) => widget.name === "fix")?.value
    const { changed } = inputs.counts()
    return [node.id, node.mode, Boolean(node.graph), source?.id, source?.title, fix, inputs.open, changed, vueNodes()].join(":")
  })
}

/** Whether the canvas is zoomed so far out that only large words can be read. */
export const isFar = () => (app.canvas?.ds?.scale ?? 1) < FAR_ZOOM

/** The report that a node's panel shows at present, or null. */
export const reportShown = (node) => shownOf(node).view.report

/** A node that has left its graph: its panel is not painted any more. */
export function drop(node) {
  panels.get(node)?.view.dispose()
  panels.delete(node)
}

/** The button over the panel that shows the advanced inputs; Nodes 2.0 has one of its own. */
function advancedOf(inputs) {
  const { all, changed } = inputs.counts()
  const always = app.extensionManager?.setting?.get("Comfy.Node.AlwaysShowAdvancedWidgets") === true
  if (vueNodes() || all === 0 || always) return null
  const key = inputs.open ? "button.basic" : changed > 0 ? "button.advancedChanged" : "button.advanced"
  return { words: texts.t(key, { n: all, changed }), open: inputs.open }
}
