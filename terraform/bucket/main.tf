# Where runs are kept. Folders are renamed in one step (hierarchical namespace): so a checkpoint becomes one. What was
# deleted or overwritten can be had back for some days, and the bucket goes only when it is empty.

resource "google_storage_bucket" "this" {
  #checkov:skip=CKV_GCP_78:a bucket with a hierarchical namespace has no versions; soft delete keeps what was removed
  #checkov:skip=CKV_GCP_62:who reads it is in Cloud Audit Logs; usage logs would need another bucket
  project                     = var.project
  name                        = var.name
  location                    = var.location
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  force_destroy               = false

  hierarchical_namespace {
    enabled = true
  }

  soft_delete_policy {
    retention_duration_seconds = var.kept_days * 24 * 60 * 60
  }
}

resource "google_storage_bucket_iam_member" "writers" {
  for_each = var.writers

  bucket = google_storage_bucket.this.name
  role   = "roles/storage.objectUser"
  member = each.value
}
