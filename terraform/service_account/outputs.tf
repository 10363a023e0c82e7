output "email" {
  description = "The email of the account."
  value       = google_service_account.this.email
}

output "member" {
  description = "The account as IAM names it, as `writers` of the module `bucket` takes it."
  value       = local.member
}
