import assert from "node:assert/strict"
import { test } from "node:test"
import { aside, executionIds, modelSource, nodeOf, rootGraph, workflowId } from "../../../web/graph.js"

function graphOf(id, nodes) {
  const graph = { id, nodes }
  for (const node of nodes) node.graph = graph
  return graph
}

test("execution ids on the root, in subgraphs, and in a subgraph placed twice", () => {
  const deep = { id: 3 }
  const inner = { id: 7 }
  const innermost = graphOf("c", [deep])
  const middle = graphOf("b", [inner, { id: 5, subgraph: innermost }])
  const top = { id: 1 }
  const root = graphOf("a", [top, { id: 12, subgraph: middle }, { id: 13, subgraph: middle }])
  assert.deepEqual(executionIds(root, top), ["1"])
  assert.deepEqual(executionIds(root, inner), ["12:7", "13:7"])
  assert.deepEqual(executionIds(root, deep), ["12:5:3", "13:5:3"])
  assert.deepEqual(executionIds(root, { id: 9, graph: {} }), [])
  assert.deepEqual(executionIds(null, top), [])
})

test("the root graph and the workflow's id, whatever is on screen", () => {
  const root = { id: "wf" }
  assert.equal(workflowId({ rootGraph: root }), "wf")
  assert.equal(workflowId({ graph: { id: "sub", rootGraph: root } }), "wf")
  assert.equal(workflowId({ graph: { id: 3 } }), null)
  assert.equal(workflowId({}), null)
  assert.equal(rootGraph(undefined), null)
})

test("the node under an execution id", () => {
  const inner = { id: 7 }
  const outer = { id: 12, subgraph: graphOf("b", [inner]) }
  const root = graphOf("a", [{ id: 1 }, outer])
  assert.equal(nodeOf(root, "12:7"), inner)
  assert.equal(nodeOf(root, 12), outer)
  for (const none of ["9", "12:9", "1:7", "", null]) assert.equal(nodeOf(root, none), null)
})

/** A graph as litegraph has them: links by id, [id, origin, origin slot]; a node's inputs are [type, link id]. */
function wired(nodes, links = [], rest = {}) {
  const table = new Map(links.map(([id, origin_id, origin_slot = 0]) => [id, { id, origin_id, origin_slot }]))
  const graph = graphOf("g", nodes.map(({ inputs = [], ...node }) => ({ mode: 0, ...node, inputs: inputs.map(([type, link = null]) => ({ type, link })) })))
  return Object.assign(graph, { getLink: (id) => table.get(id) }, rest)
}
const TYPES = new Set(["MossFP16Loader", "MossFP16Fix"])
const source = (root, graph, id) => modelSource(root, graph.nodes.find((node) => node.id === id), TYPES)

test("the node a MODEL comes from, through nodes in between, past bypassed ones", () => {
  const chain = (modes = {}) =>
    wired(
      [
        { id: 1, comfyClass: "MossFP16Loader", mode: modes.loader ?? 0 },
        { id: 2, comfyClass: "LoraLoader", inputs: [["CLIP"], ["MODEL", 10]] },
        { id: 3, comfyClass: "MossFP16Fix", inputs: [["MODEL", 11]], mode: modes.fix ?? 0 },
        { id: 4, comfyClass: "MossFP16Report", inputs: [["MODEL", 12]] },
        { id: 5, comfyClass: "MossFP16Report", inputs: [["MODEL"]] },
      ],
      [[10, 1], [11, 2], [12, 3]],
    )
  const at = (graph, id) => source(graph, graph, id)?.id
  assert.equal(at(chain(), 4), 3)
  assert.equal(at(chain(), 3), 1)
  assert.equal(at(chain({ fix: 4 }), 4), 1)
  assert.equal(at(chain({ fix: 2 }), 4), undefined)
  assert.equal(at(chain({ fix: 4, loader: 4 }), 4), undefined)
  assert.equal(at(chain(), 5), undefined)
  assert.deepEqual([{ mode: 0 }, { mode: 2 }, { mode: 4 }].map(aside), ["", "muted", "bypassed"])
})

test("a MODEL that comes into, or out of, a subgraph", () => {
  const inside = wired(
    [{ id: 7, comfyClass: "MossFP16Fix", inputs: [["MODEL", 20]] }, { id: 8, comfyClass: "MossFP16Report", inputs: [["MODEL", 21]] }],
    [[20, -10], [21, -10], [22, 7]],
    { outputs: [{ linkIds: [22] }] },
  )
  const root = wired(
    [{ id: 1, comfyClass: "MossFP16Loader" }, { id: 12, subgraph: inside, inputs: [["MODEL", 10]] }, { id: 4, comfyClass: "MossFP16Report", inputs: [["MODEL", 11]] }],
    [[10, 1], [11, 12]],
  )
  assert.equal(source(root, inside, 8).id, 1)
  assert.equal(source(root, root, 4).id, 7)
})

test("a node without a graph, a loop, a link to nowhere: no source, no throw", () => {
  const loose = { comfyClass: "MossFP16Report", graph: null, inputs: [{ type: "MODEL", link: 3 }] }
  assert.equal(modelSource({}, loose, TYPES), null)
  const loop = wired([{ id: 1, comfyClass: "Loop", inputs: [["MODEL", 10]] }], [[10, 1]])
  assert.equal(source(loop, loop, 1), null)
  const nowhere = wired([{ id: 1, comfyClass: "MossFP16Report", inputs: [["MODEL", 10]] }], [[10, 99]])
  assert.equal(source(nowhere, nowhere, 1), null)
})
