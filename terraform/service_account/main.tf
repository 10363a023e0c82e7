# The service account of the machines: it writes logs and metrics and reads images of one repository. The module `bucket`
# grants access to the bucket; no role here can create or delete a machine.

locals {
  member = "serviceAccount:${google_service_account.this.email}"
}

resource "google_project_service" "this" {
  for_each = toset(["iam.googleapis.com", "cloudresourcemanager.googleapis.com"])

  project            = var.project
  service            = each.value
  disable_on_destroy = false # another stack may need it
}

resource "google_service_account" "this" {
  project      = var.project
  account_id   = var.name
  display_name = "dtrain: machines of ${var.name}"

  depends_on = [google_project_service.this]
}

resource "google_project_iam_member" "roles" {
  for_each = toset(["roles/logging.logWriter", "roles/monitoring.metricWriter"])

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
