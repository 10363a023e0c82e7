output "bucket" {
  description = "The name; known only after `writers` have access, since the mount needs it."
  value       = local.name
  depends_on  = [google_storage_bucket_iam_member.writers, google_storage_bucket_iam_member.launch_readers]
}

output "files" {
  description = "The gs:// paths of `files`, with the same keys."
  value       = { for name, object in google_storage_bucket_object.launch : name => "gs://${local.name}/${object.name}" }
}
