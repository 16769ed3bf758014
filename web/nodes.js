// The panel on the pack's three reporting nodes: put on when a node is made, alive while the node is on a graph.

import { app } from "../../scripts/app.js"
import { AdvancedInputs, setHints } from "./inputs.js"
import { drop, isFar, refresh, reportShown } from "./paint.js"
import { applyRemedy } from "./remedy.js"
import { panels, texts, vueNodes } from "./state.js"
import { PanelView } from "./view.js"

const HEIGHT = 320 // with the canvas' margin of 10 on each side
const SMALL_HEIGHT = 190
const BUTTON_HEIGHT = 30 // of the button for the advanced inputs

/** Puts a panel on a node that was just made. */
export function attach(node) {
  const inputs = new AdvancedInputs(node)
  const act = (what) => {
    if (what === "remedy") applyRemedy(node, reportShown(node))
    else inputs.toggle()
    refresh()
  }
  const view = new PanelView(texts, act)
  view.root.classList.toggle("moss-far", isFar())
  // A workflow that is being loaded has its links later than its nodes: until the first paint nothing is grown.
  const getMinHeight = () => (view.small || !view.shown ? SMALL_HEIGHT : HEIGHT) + (view.advanced.hidden ? 0 : BUTTON_HEIGHT)
  // hideInPanel: the side panel would show the same element, and so take it out of the node.
  const options = { serialize: false, hideOnZoom: false, hideInPanel: true, getMinHeight, getValue: () => "" }
  const widget = node.addDOMWidget("moss_fp16_panel", "moss_fp16_panel", view.root, options)
  widget.serialize = false // not in the workflow JSON; options.serialize keeps it out of the prompt
  passThrough(view.root)
  const panel = { view, inputs }
  follow(node, "onAdded", () => enter(node, panel))
  follow(node, "onRemoved", () => drop(node))
  if (node.graph) enter(node, panel)
}

/** Calls `then` after whatever the node's own callback does. */
function follow(node, name, then) {
  const own = node[name]
  node[name] = function (...args) {
    const result = own?.apply(this, args)
    then()
    return result
  }
}

/** Only nodes on a graph have a panel: those that were made to be copied, or taken off, have none. */
function enter(node, panel) {
  panels.set(node, panel)
  panel.inputs.settle()
  setHints(node, texts.t)
  panel.view.observe()
  refresh()
}

/** In the classic canvas the wheel and the middle button over the panel still zoom and pan. */
function passThrough(element) {
  const canvas = () => (vueNodes() ? null : app.canvas)
  element.addEventListener(
    "wheel",
    (event) => {
      const scroller = event.target.closest?.(".moss-table, .moss-panel")
      const scrolls = scroller && scroller.scrollHeight > scroller.clientHeight + 1
      if (scrolls && !event.ctrlKey) return event.stopPropagation()
      if (!canvas()) return
      event.preventDefault()
      canvas().processMouseWheel(event)
    },
    { passive: false },
  )
  element.addEventListener("pointerdown", (event) => event.button === 1 && canvas()?.processMouseDown(event))
  element.addEventListener("pointermove", (event) => event.buttons & 4 && canvas()?.processMouseMove(event))
  element.addEventListener("pointerup", (event) => event.button === 1 && canvas()?.processMouseUp(event))
}
