# Who a training machine is: it writes logs and metrics, reads the images and secrets that are named, and nothing else. The
# bucket gives it its own role.

locals {
  # a machine that gives itself back, and its watcher, may delete and create machines
  keeper = var.keeper ? ["roles/tpu.admin", "roles/compute.instanceAdmin.v1"] : []
  roles  = toset(concat(["roles/logging.logWriter", "roles/monitoring.metricWriter"], local.keeper))
  member = "serviceAccount:${google_service_account.this.email}"
}

resource "google_service_account" "this" {
  project      = var.project
  account_id   = var.name
  display_name = "dtrain: training machines"
}

resource "google_project_iam_member" "roles" {
  for_each = local.roles

  project = var.project
  role    = each.value
  member  = local.member
}

resource "google_artifact_registry_repository_iam_member" "images" {
  count = var.images == null ? 0 : 1

  project    = var.project
  location   = var.images.location
  repository = var.images.repository
  role       = "roles/artifactregistry.reader"
  member     = local.member
}

resource "google_project_iam_member" "secrets" {
  count = length(var.secrets) > 0 ? 1 : 0

  project = var.project
  role    = "roles/secretmanager.secretAccessor"
  member  = local.member

  condition {
    title      = "named secrets alone"
    expression = join(" || ", [for name in var.secrets : "resource.name.extract('secrets/{name}/') == '${name}'"])
  }
}

# who creates a machine that runs as this account must be allowed to use it: the watcher runs as it too
resource "google_service_account_iam_member" "itself" {
  count = var.keeper ? 1 : 0

  service_account_id = google_service_account.this.name
  role               = "roles/iam.serviceAccountUser"
  member             = local.member
}
