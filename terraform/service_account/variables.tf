variable "project" {
  description = "The Google Cloud project."
  type        = string
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.project))
    error_message = "A project is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "name" {
  description = "The name of the account, before the @. Two stacks in one project need two names."
  type        = string
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.name))
    error_message = "An account is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "images" {
  description = "The Artifact Registry repository whose images the machines pull."
  type        = object({ location = string, repository = string })
  default     = null
}
