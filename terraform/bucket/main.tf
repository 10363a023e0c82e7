# The bucket of the runs, with a hierarchical namespace: folders are listed and deleted faster. `terraform destroy` keeps
# it and its contents. Machines may write everywhere except in launch/, which holds the wheel and the lock file that they
# install as root.

locals {
  objects = "projects/_/buckets/${var.name}"
  name    = var.create ? google_storage_bucket.this[0].name : data.google_storage_bucket.existing[0].name
  launch  = [for kind in ["objects", "folders", "managedFolders"] : "resource.name.startsWith('${local.objects}/${kind}/launch/')"]
}

resource "google_storage_bucket" "this" {
  #checkov:skip=CKV_GCP_78:a bucket with a hierarchical namespace has no versions
  #checkov:skip=CKV_GCP_62:access is in Cloud Audit Logs; usage logs would need another bucket
  count = var.create ? 1 : 0

  project                     = var.project
  name                        = var.name
  location                    = var.region
  labels                      = merge({ tool = "dtrain" }, var.labels)
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  force_destroy               = false
  deletion_policy             = "ABANDON" # `terraform destroy` removes it from the state and deletes nothing

  hierarchical_namespace {
    enabled = true
  }

  # each day of soft delete costs a day of deleted checkpoints: 10 GB that rotate every 10 minutes are 10 TB in a week
  soft_delete_policy {
    retention_duration_seconds = var.soft_delete_days * 24 * 60 * 60
  }

  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }
    condition {
      age = 1
    }
  }
}

data "google_storage_bucket" "existing" {
  count = var.create ? 0 : 1

  project = var.project
  name    = var.name

  lifecycle {
    postcondition {
      condition     = lower(self.location) == var.region
      error_message = "The bucket ${var.name} is in ${self.location}, not in ${var.region}: traffic between regions is slow and billed."
    }
  }
}

resource "google_storage_bucket_iam_member" "writers" {
  for_each = var.writers

  bucket = local.name
  role   = "roles/storage.objectUser"
  member = each.value

  condition {
    title      = "all but launch"
    expression = join(" && ", [for clause in local.launch : "!${clause}"])
  }
}

resource "google_storage_bucket_iam_member" "launch_readers" {
  for_each = var.writers

  bucket = local.name
  role   = "roles/storage.objectViewer"
  member = each.value

  condition {
    title      = "launch"
    expression = local.launch[0]
  }
}

# named by content: new content is a new object, so that machines are replaced when the wheel or the lock file changes
resource "google_storage_bucket_object" "launch" {
  for_each = var.files

  bucket = local.name
  name   = "launch/${var.stack}/${fileexists(each.value) ? substr(filesha256(each.value), 0, 12) : "absent"}/${basename(each.value)}"
  source = each.value

  lifecycle {
    precondition {
      condition     = fileexists(each.value)
      error_message = "There is no file ${each.value}."
    }
  }
}
