output "email" {
  description = "The account's address."
  value       = google_service_account.this.email
}

output "member" {
  description = "The account as IAM names it, as the bucket's `writers` take it."
  value       = "serviceAccount:${google_service_account.this.email}"
}
