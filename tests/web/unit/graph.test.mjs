import assert from "node:assert/strict"
import { test } from "node:test"
import { executionIds, modelSource, rootGraph, workflowId } from "../../../web/graph.js"

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

test("the node a MODEL comes from, through nodes in between", () => {
  const node = (comfyClass, source) => ({
    comfyClass, inputs: [{ type: "CLIP" }, { type: "MODEL" }], getInputNode: (slot) => (slot === 1 ? source : null),
  })
  const types = new Set(["MossFP16Loader", "MossFP16Fix"])
  const loader = node("MossFP16Loader", null)
  assert.equal(modelSource(node("MossFP16Report", node("LoraLoader", loader)), types), loader)
  assert.equal(modelSource(node("MossFP16Report", null), types), null)
  assert.equal(modelSource({ inputs: [] }, types), null)
  const loop = { inputs: [{ type: "MODEL" }], getInputNode: () => loop }
  assert.equal(modelSource(loop, types), null)
})
