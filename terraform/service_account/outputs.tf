output "email" {
  description = "The email of the account."
  value       = google_service_account.this.email
}

output "member" {
  description = "The account's IAM member, for `writers` of the module `bucket`."
  value       = local.member
}
