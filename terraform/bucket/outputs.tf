output "bucket" {
  description = "The name, as `launch: {bucket: ...}` takes it."
  value       = google_storage_bucket.this.name
}
