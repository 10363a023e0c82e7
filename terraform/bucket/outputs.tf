output "bucket" {
  description = "The name, known once `writers` may write: the mount needs it."
  value       = local.name
  depends_on  = [google_storage_bucket_iam_member.writers, google_storage_bucket_iam_member.launch_readers]
}

output "files" {
  description = "Where `files` are, as gs:// paths by the same names."
  value       = { for name, object in google_storage_bucket_object.launch : name => "gs://${local.name}/${object.name}" }
}
