// The last report of every node of every workflow that this page has heard of, and what the current run is doing.
// Pure state: no DOM, no network. A slot is found by workflow id and execution id ("12:3" inside subgraph node 12).

import { normalise, normaliseMessage } from "./report.js"

const MAX_RUNS = 200
const MAX_SLOTS = 500
const ENDED = new Set(["done", "failed", "interrupted"])

const key = (workflowId, nodeId) => `${workflowId}\u0000${nodeId}`

/** What a panel shows before it has heard anything. */
export const EMPTY = Object.freeze({
  phase: "idle", // idle | waiting | running | done | failed | interrupted | unsampled
  report: null,
  refusal: null,
  notes: Object.freeze([]),
  cached: false,
  promptId: null,
  error: null, // why it failed, a message
  errorNode: null, // the execution id of the node that failed
  order: 0,
})

/** The report's own reason first: it can be translated. */
const whyFailed = (run, report) => ({ error: report?.error ?? run.error ?? null, errorNode: run.errorNode ?? null })

export class ReportStore {
  constructor() {
    this.queued = new Set()
    this.slots = new Map()
    this.runs = new Map()
    this.order = 0
  }

  #run(promptId) {
    let run = this.runs.get(promptId)
    if (!run) {
      run = { order: ++this.order, workflowId: null, heardIn: null, started: false, ended: null, cached: new Set(), waiting: [] }
      this.runs.set(promptId, run)
      if (this.runs.size > MAX_RUNS) this.runs.delete(this.runs.keys().next().value)
    }
    return run
  }

  #slot(workflowId, nodeId) {
    const id = key(workflowId, nodeId)
    const slot = this.slots.get(id) ?? { ...EMPTY, workflowId, nodeId, previous: null }
    this.slots.delete(id) // so that the Map's order is by last use
    this.slots.set(id, slot)
    if (this.slots.size > MAX_SLOTS) this.slots.delete(this.slots.keys().next().value)
    return slot
  }

  #ofWorkflow(workflowId) {
    return [...this.slots.values()].filter((slot) => slot.workflowId === workflowId)
  }

  /** A run began. Its workflow may be told later (`runBelongsTo`), when the server has been asked. */
  runStarted(promptId) {
    const run = this.#run(promptId)
    if (!run.started) run.order = ++this.order // a report of it may have come first, after a reload
    run.started = true
  }

  /** The run's workflow is known: its panels forget the run before (kept aside in case this one is all cache). */
  runBelongsTo(promptId, workflowId) {
    const run = this.#run(promptId)
    if (!workflowId) return
    run.workflowId = workflowId
    for (const slot of this.#ofWorkflow(workflowId)) {
      if (slot.promptId === promptId) continue
      if (this.runs.has(slot.promptId) && this.runs.get(slot.promptId).order > run.order) continue
      const previous = slot.report ? { report: slot.report, notes: slot.notes } : slot.previous
      Object.assign(slot, EMPTY, { phase: "waiting", promptId, previous, order: ++this.order })
    }
    for (const entry of run.waiting.splice(0)) this.receive(entry)
    if (run.ended) this.#close(promptId, run)
  }

  /** Whether the run is this page's own or one of the workflow on screen: not a script's, nor another tab's. */
  concerns(promptId, workflowId) {
    const run = this.runs.get(promptId)
    return run !== undefined && (run.started || (workflowId !== null && run.heardIn === workflowId))
  }

  /** The server answers these nodes of the run from its cache. */
  runCached(promptId, nodeIds) {
    const run = this.#run(promptId)
    for (const id of Array.isArray(nodeIds) ? nodeIds : []) run.cached.add(String(id))
  }

  /** The run is over: "done", "failed" or "interrupted"; `error` is the English of why and `errorNode` where. */
  runEnded(promptId, outcome, error = null, errorNode = null) {
    const run = this.#run(promptId)
    if (run.ended) return
    run.ended = outcome
    run.error = error ? normaliseMessage(error) : null
    run.errorNode = errorNode
    this.#close(promptId, run)
  }

  #close(promptId, run) {
    for (const slot of this.slots.values()) {
      if (slot.promptId !== promptId || ENDED.has(slot.phase)) continue
      if (slot.phase === "running" || run.ended !== "done") {
        Object.assign(slot, { phase: run.ended, ...whyFailed(run, slot.report) })
      } else if (run.cached.has(slot.nodeId) && slot.previous) {
        Object.assign(slot, { ...slot.previous, phase: "done", cached: true })
      } else {
        slot.phase = "unsampled"
      }
      slot.order = ++this.order
    }
  }

  /**
   * One message: {node_id, prompt_id, workflow_id, state, report}. Returns whether it changed anything.
   * A message of a run older than the one the panel is on is dropped: it was overtaken.
   */
  receive(entry) {
    if (typeof entry !== "object" || entry === null) return false
    const nodeId = entry.node_id
    if ((typeof nodeId !== "string" && typeof nodeId !== "number") || nodeId === "") return false
    const promptId = typeof entry.prompt_id === "string" ? entry.prompt_id : ""
    const known = this.runs.get(promptId)
    const workflowId = typeof entry.workflow_id === "string" && entry.workflow_id ? entry.workflow_id : known?.workflowId
    if (!workflowId) {
      // A run of this page whose workflow is still being asked for; a job of a script belongs to no panel.
      if (!known?.started) return false
      known.waiting.push(entry)
      return true
    }
    if (known && !known.workflowId) this.runBelongsTo(promptId, workflowId)
    const slot = this.#slot(workflowId, String(nodeId))
    const run = this.#run(promptId)
    run.heardIn = workflowId
    const current = slot.promptId === null ? undefined : this.runs.get(slot.promptId)
    if (slot.promptId !== promptId && current && current.order > run.order) return false
    const { report, refusal, notes } = normalise(entry.report)
    const state = String(entry.state ?? report?.state ?? "")
    let phase = state === "running" || ENDED.has(state) ? state : "done"
    if (phase === "running" && run.ended) phase = run.ended
    const cached = run.cached.has(String(nodeId)) && phase === "done" && entry.live !== true
    Object.assign(slot, {
      phase,
      report,
      refusal,
      notes,
      promptId,
      previous: null,
      cached: cached || report?.cached === true,
      ...(phase === "failed" ? whyFailed(run, report) : { error: null, errorNode: null }),
      order: ++this.order,
    })
    return true
  }

  /** The workflows that have a run waiting in the server's queue. */
  setQueued(workflowIds) {
    this.queued = new Set(workflowIds)
  }

  /** The runs that began and are not known to have ended. */
  openRuns() {
    return [...this.runs].filter(([, run]) => run.started && !run.ended).map(([promptId]) => promptId)
  }

  /** Reports that claim to be running although their run is not in the server's queue: it went away without a word. */
  endOrphans(runningPromptIds) {
    for (const slot of this.slots.values()) {
      if (slot.phase !== "running" || runningPromptIds.has(slot.promptId)) continue
      Object.assign(slot, { phase: "interrupted", order: ++this.order })
    }
  }

  /** What a node without a slot shows: the last run of its workflow may be on its way to it, or have passed it by. */
  #unheard(workflowId, nodeIds) {
    let last = null
    for (const [promptId, run] of this.runs) {
      if (run.workflowId === workflowId && run.started) last = { promptId, run }
    }
    if (!last) return EMPTY
    const { promptId, run } = last
    if (!run.ended) return { ...EMPTY, phase: "waiting", promptId }
    if (run.ended !== "done") return { ...EMPTY, phase: run.ended, promptId, ...whyFailed(run, null) }
    return nodeIds.some((id) => run.cached.has(id)) ? { ...EMPTY, phase: "unsampled", promptId } : EMPTY
  }

  /**
   * What the panel of a node shows. A node in a subgraph that is placed more than once has one execution id per
   * place; the one heard of last is shown, and `instance` then names it.
   */
  view(workflowId, nodeIds) {
    const queued = this.queued.has(workflowId)
    const found = nodeIds.map((id) => this.slots.get(key(workflowId, id))).filter((slot) => slot !== undefined)
    if (found.length === 0) return { ...this.#unheard(workflowId, nodeIds), queued }
    const latest = found.reduce((a, b) => (b.order > a.order ? b : a))
    return { ...latest, queued, ...(nodeIds.length > 1 ? { instance: latest.nodeId } : {}) }
  }
}
