# Who a training machine is: it writes logs and metrics, reads the images and secrets that are named, and nothing else. The
# bucket gives it its own role.

locals {
  roles = toset(["roles/logging.logWriter", "roles/monitoring.metricWriter"])
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
  member  = "serviceAccount:${google_service_account.this.email}"
}

resource "google_artifact_registry_repository_iam_member" "images" {
  count = var.images == null ? 0 : 1

  project    = var.project
  location   = var.images.location
  repository = var.images.repository
  role       = "roles/artifactregistry.reader"
  member     = "serviceAccount:${google_service_account.this.email}"
}
