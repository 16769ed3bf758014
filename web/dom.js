// Element builders. Children are elements or text; text always becomes a text node, never markup.

const SVG = "http://www.w3.org/2000/svg"

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, String(value))
  }
  node.append(...children)
  return node
}

export const html = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children)
export const svg = (tag, attributes = {}, ...children) => build(document.createElementNS(SVG, tag), attributes, children)

/** Sets an attribute only where it changes, so that a repaint of an unchanged chart touches nothing. */
export function put(node, name, value) {
  const next = String(value)
  if (node.getAttribute(name) !== next) node.setAttribute(name, next)
}

export function putText(node, value) {
  if (node.textContent !== value) node.textContent = value
}
