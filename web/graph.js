// Which node an execution id means, and back; where a MODEL comes from. Works on litegraph's graphs by shape alone.

const SUBGRAPH_INPUT = -10 // the origin of a link that comes from outside of a subgraph
const MUTED = 2
const BYPASSED = 4
const DEPTH = 16
const HOPS = 64

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
    if (!graph || depth > DEPTH) return
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

/** The node that runs under an execution id, or null. */
export function nodeOf(root, executionId) {
  let graph = root
  let node = null
  for (const part of String(executionId).split(":")) {
    node = nodesOf(graph).find((candidate) => String(candidate.id) === part) ?? null
    graph = node?.subgraph ?? null
  }
  return node
}

/** "muted" or "bypassed" where the node does not run as itself, else "". */
export function aside(node) {
  if (node.mode === MUTED) return "muted"
  return node.mode === BYPASSED ? "bypassed" : ""
}

/** The subgraph node that holds this graph, where it is found first. */
function hostOf(root, graph, depth = 0) {
  if (depth > DEPTH) return null
  for (const node of nodesOf(root)) {
    if (!node.subgraph) continue
    if (node.subgraph === graph) return node
    const deeper = hostOf(node.subgraph, graph, depth + 1)
    if (deeper) return deeper
  }
  return null
}

const linkOf = (graph, id) => (id === null || id === undefined ? null : (graph?.getLink?.(id) ?? graph?.links?.get?.(id) ?? null))
const nodeIn = (graph, id) => nodesOf(graph).find((node) => String(node.id) === String(id)) ?? null

/** The node at the other end of an input's link: through the walls of subgraphs, in either direction. */
function feeding(root, node, slot, hops = 0) {
  const link = linkOf(node.graph, node.inputs?.[slot]?.link)
  if (!link || hops > HOPS) return null
  if (Number(link.origin_id) === SUBGRAPH_INPUT) {
    const host = hostOf(root, node.graph)
    return host ? feeding(root, host, link.origin_slot, hops + 1) : null
  }
  return insideOf(nodeIn(node.graph, link.origin_id), link.origin_slot, hops)
}

/** The node itself, or the one within its subgraph that feeds this output. */
function insideOf(node, slot, hops) {
  const inner = node?.subgraph
  if (!inner || hops > HOPS) return node
  const link = linkOf(inner, inner.outputs?.[slot]?.linkIds?.[0])
  return link ? insideOf(nodeIn(inner, link.origin_id), link.origin_slot, hops + 1) : null
}

/**
 * The loader or fix node whose MODEL reaches this node, followed upwards through MODEL inputs; null where there is none
 * or it does not run. The report node shows that node's live report until its own arrives.
 */
export function modelSource(root, node, types) {
  let at = node
  for (let hops = 0; hops < HOPS && at?.graph; hops++) {
    const slot = (at.inputs ?? []).findIndex((input) => input?.type === "MODEL")
    const next = slot === -1 ? null : feeding(root, at, slot)
    if (!next || aside(next) === "muted") return null
    if (types.has(next.comfyClass ?? next.type) && aside(next) === "") return next
    at = next
  }
  return null
}
