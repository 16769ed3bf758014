// The widgets of the pack's nodes: the advanced ones out of the way on the classic canvas, hints in the empty ones.

/** Empty text inputs that need a hint: name -> key of its words. */
const HINTS = { c: "hint.c", param_dtypes: "hint.paramDtypes" }
const LINE = 44 // px, of a text area that is not in use, with the canvas' margins
const LINES = 84

const isAdvanced = (widget) => widget.options?.advanced === true || widget.advanced === true
const isLinked = (node, widget) => node.inputs?.some((input) => input.widget?.name === widget.name && input.link !== null && input.link !== undefined)

/** With or without a row on the classic canvas; Nodes 2.0 has its own way of hiding it. */
function setAway(widget, away) {
  const surfaces = widget.visibility?.surfaces
  if (surfaces) surfaces.canvas = away ? "never" : "shown"
  else widget.hidden = away && !globalThis.LiteGraph?.vueNodesMode // a frontend before surfaces
}

/** The value an input has when nobody changed it, from the node's own description; undefined where there is none. */
function defaultOf(node, name) {
  const { required = {}, optional = {} } = node.constructor?.nodeData?.input ?? {}
  return (optional[name] ?? required[name])?.[1]?.default
}

/** The widgets that Nodes 2.0 hides behind "Show advanced inputs". */
export class AdvancedInputs {
  constructor(node) {
    this.node = node
    this.names = new Set((node.widgets ?? []).filter(isAdvanced).map((widget) => widget.name))
  }

  get #widgets() {
    return (this.node.widgets ?? []).filter((widget) => this.names.has(widget.name))
  }

  /** Takes them out of the way on the classic canvas too, save those that are fed by a link, until they are opened. */
  settle() {
    for (const widget of this.#widgets) setAway(widget, !this.open && !isLinked(this.node, widget))
  }

  get open() {
    return this.node.showAdvanced === true
  }

  /** How many there are, and how many are not as they come. */
  counts() {
    const widgets = this.#widgets
    const changed = widgets.filter((widget) => {
      const usual = defaultOf(this.node, widget.name)
      return usual !== undefined && widget.value !== usual
    })
    return { all: widgets.length, changed: changed.length }
  }

  /** Shows or hides them; on the classic canvas the node grows or shrinks by their height. */
  toggle(open = !this.open) {
    if (open === this.open) return
    const { node } = this
    const before = node.computeSize()[1]
    node.showAdvanced = open
    this.settle()
    if (!globalThis.LiteGraph?.vueNodesMode) {
      const after = node.computeSize()[1]
      node.setSize([node.size[0], Math.max(after, node.size[1] + after - before)])
    }
    node.setDirtyCanvas?.(true, true)
  }

  /** Opens them where one of them is what a refused prompt was refused for. */
  showFault(errors) {
    const names = (errors ?? []).map((error) => error?.extra_info?.input_name)
    if (names.some((name) => this.names.has(name))) this.toggle(true)
  }
}

/** Puts hints into the empty inputs, in the reader's language, and makes param_dtypes one line until it is used. */
export function setHints(node, t) {
  for (const widget of node.widgets ?? []) {
    const key = HINTS[widget.name]
    if (!key) continue
    const words = t(key)
    if (widget.element) oneLine(widget, words)
    else hint(widget, words)
  }
}

function hint(widget, words) {
  if (widget.options) widget.options.placeholder = words
  const first = widget.mossHint === undefined
  widget.mossHint = words
  if (!first || Object.getOwnPropertyDescriptor(widget, "_displayValue")?.configurable === false) return
  // The classic canvas knows no placeholders: it draws what this says.
  Object.defineProperty(widget, "_displayValue", {
    configurable: true,
    get() {
      if (this.computedDisabled) return ""
      return this.value === "" || this.value === null || this.value === undefined ? this.mossHint : String(this.value)
    },
  })
}

function oneLine(widget, words) {
  const { element, options } = widget
  if (element.placeholder !== words) element.placeholder = words
  if (options.mossOneLine) return
  options.mossOneLine = true
  const height = () => (document.activeElement === element || element.value.includes("\n") ? LINES : LINE)
  options.getMinHeight = height
  options.getMaxHeight = height
  const settle = () => widget.node?.setDirtyCanvas?.(true, true)
  element.addEventListener("focus", settle)
  element.addEventListener("blur", settle)
}
