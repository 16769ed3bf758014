// What the server says of its runs, kept in the store: reports and notices while they go on, and what this page missed.

import { api } from "../../scripts/api.js"
import { app } from "../../scripts/app.js"
import * as graph from "./graph.js"
import { refresh } from "./paint.js"
import { panels, store, texts } from "./state.js"
import { Toasts, onPage } from "./toasts.js"

const toasts = new Toasts(texts, onPage(() => app.extensionManager?.toast))

const changed = (did) => did !== false && refresh()
const listen = (name, handle) => api.addEventListener(name, (event) => changed(handle(event.detail ?? {})))

export async function getJson(route) {
  const response = await api.fetchApi(route)
  if (!response.ok) throw new Error(`${route}: ${response.status}`)
  return response.json()
}

/** Which workflow a run belongs to is the server's to say; an older server cannot, then it is the one on screen. */
async function resolveRun(promptId) {
  let workflow = graph.workflowId(app)
  try {
    workflow = (await getJson(`/jobs/${encodeURIComponent(promptId)}`)).workflow_id ?? null
  } catch {
    // No such route, or the run is over already.
  }
  store.runBelongsTo(promptId, workflow)
  refresh()
}

function startRun({ prompt_id: promptId }) {
  if (typeof promptId !== "string") return
  store.runStarted(promptId)
  resolveRun(promptId)
}

function onExecuted({ node, output, prompt_id: promptId }) {
  const report = output?.moss_fp16_report?.[0]
  return report ? store.receive({ node_id: String(node), prompt_id: promptId, state: report.state, report }) : false
}

/** After a reload or a reconnect: the workflow's last report per node, and whether a run of it is under way. */
async function restore() {
  const workflow = graph.workflowId(app)
  if (!workflow) return
  try {
    const entries = await getJson(`/moss_fp16/reports?workflow_id=${encodeURIComponent(workflow)}`)
    const running = await runningJobs()
    for (const entry of Object.values(entries)) store.receive({ ...entry, live: true })
    for (const job of running ?? []) {
      store.runStarted(job.id)
      store.runBelongsTo(job.id, job.workflow_id)
    }
    if (running) await endMissedRuns(new Set(running.map((job) => job.id)))
  } catch (error) {
    console.warn("[MOSS FP16] The last reports could not be read:", error)
  }
  refresh()
}

let restored = null

/** Another workflow came on screen: its reports may be older than this page. */
export function graphChanged() {
  const workflow = graph.workflowId(app)
  if (workflow !== restored && panels.size > 0) {
    restored = workflow
    restore()
  }
  refresh()
}

const OUTCOMES = { completed: "done", failed: "failed", cancelled: "interrupted" }

/** Runs whose end this page did not hear of. */
async function endMissedRuns(running) {
  for (const promptId of store.openRuns().filter((id) => !running.has(id))) {
    const job = await getJson(`/jobs/${encodeURIComponent(promptId)}`).catch(() => ({ status: "cancelled" }))
    if (job.status in OUTCOMES) store.runEnded(promptId, OUTCOMES[job.status])
  }
  store.endOrphans(running)
}

async function runningJobs() {
  try {
    const { jobs } = await getJson("/jobs?status=in_progress&limit=20")
    return Array.isArray(jobs) ? jobs : null
  } catch {
    return null
  }
}

function onNotice(notice) {
  if (store.concerns(notice.prompt_id, graph.workflowId(app))) toasts.notice(notice)
  return false
}

/** Which workflows have a run waiting in the queue. */
async function lookAtQueue() {
  try {
    const { jobs } = await getJson("/jobs?status=pending&limit=50")
    store.setQueued((Array.isArray(jobs) ? jobs : []).map((job) => job.workflow_id).filter((id) => id))
  } catch {
    store.setQueued([]) // an older server cannot say
  }
  refresh()
}

// Registered while the module loads: the page reports messages of a type that nobody listens to as errors.
listen("moss_fp16.report", (detail) => store.receive({ ...detail, live: true }))
listen("moss_fp16.notice", onNotice)
listen("execution_start", startRun)
listen("execution_cached", ({ prompt_id: id, nodes }) => store.runCached(id, nodes))
listen("executed", onExecuted)
listen("execution_success", ({ prompt_id: id }) => store.runEnded(id, "done"))
listen("execution_error", (detail) => {
  store.runEnded(detail.prompt_id, "failed", String(detail.exception_message ?? "").trim(), detail.node_id ?? null)
})
listen("execution_interrupted", ({ prompt_id: id }) => store.runEnded(id, "interrupted"))
listen("reconnected", () => (restore(), lookAtQueue(), false))
listen("promptQueued", () => (lookAtQueue(), false))
listen("status", () => (panels.size > 0 && lookAtQueue(), false))
