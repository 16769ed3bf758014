// What a report says can be done about it: in words, and with a button that does it.

import { app } from "../../scripts/app.js"
import * as graph from "./graph.js"
import { SOURCES, texts } from "./state.js"

/** The node that a report's remedy is about: the one that made the report. */
function sourceOf(node, report) {
  const found = report?.nodeId ? graph.nodeOf(graph.rootGraph(app), report.nodeId) : null
  if (found && SOURCES.has(found.comfyClass)) return found
  return SOURCES.has(node.comfyClass) ? node : graph.modelSource(graph.rootGraph(app), node, SOURCES)
}

const linked = (node, name) => node.inputs?.some((input) => input.widget?.name === name && input.link != null) === true

/** What to do, in words, and the button that does it: {text, button, title}. */
export function remedyOf(node, report) {
  const remedy = report?.remedy
  if (!remedy) return null
  const text = texts.say(remedy)
  const { source, widget } = targetOf(node, report)
  if (!widget) return { text }
  const values = { ...remedy.action, node: source.title }
  if (widget.value === remedy.action.value) return { text: texts.t("button.isSet", values) }
  return { text, button: texts.t("button.set", values), title: texts.t("button.setOn", values) }
}

/** The widget that a remedy sets; none where the value comes in by a link. */
function targetOf(node, report) {
  const action = report?.remedy?.action
  const source = action ? sourceOf(node, report) : null
  const widget = source?.widgets?.find((candidate) => candidate.name === action.input)
  return { source, widget: widget && !linked(source, action.input) ? widget : null }
}

/** Sets the widget as a hand would: one step that undo takes back. */
export function applyRemedy(node, report) {
  const { source, widget } = targetOf(node, report)
  if (!widget) return
  const { value } = report.remedy.action
  app.canvas?.emitBeforeChange?.()
  try {
    widget.value = value
    widget.callback?.(value, app.canvas, source)
  } finally {
    app.canvas?.emitAfterChange?.()
  }
  source.setDirtyCanvas?.(true, true)
}
