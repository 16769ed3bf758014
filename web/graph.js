// Which node an execution id means, and back. Works on litegraph's graphs by shape alone.

/** The workflow's root graph, whichever subgraph is being looked at. */
export function rootGraph(app) {
  const graph = app?.rootGraph ?? app?.graph
  return graph?.rootGraph ?? graph ?? null
}

/** The id that the workflow carries into /prompt, or null. */
export function workflowId(app) {
  const id = rootGraph(app)?.id
  return typeof id === "string" && id ? id : null
}

const nodesOf = (graph) => graph?.nodes ?? graph?._nodes ?? []

/** Every execution id under which the node runs: "7" on the root, "12:7" (one per place) in a subgraph. */
export function executionIds(root, node) {
  const found = []
  const walk = (graph, prefix, depth) => {
    if (!graph || depth > 16) return
    if (graph === node.graph) {
      found.push(`${prefix}${node.id}`)
      return // a subgraph cannot hold itself
    }
    for (const outer of nodesOf(graph)) {
      if (outer.subgraph) walk(outer.subgraph, `${prefix}${outer.id}:`, depth + 1)
    }
  }
  walk(root, "", 0)
  return found
}

/**
 * The loader or fix node whose MODEL reaches this node, followed upwards through `model` inputs within one graph.
 * The report node shows that node's live report until its own arrives.
 */
export function modelSource(node, types) {
  let at = node
  for (let hops = 0; hops < 64; hops++) {
    const slot = (at.inputs ?? []).findIndex((input) => input?.type === "MODEL")
    const next = slot === -1 ? null : (at.getInputNode?.(slot) ?? null)
    if (!next) return null
    if (types.has(next.comfyClass ?? next.type)) return next
    at = next
  }
  return null
}
