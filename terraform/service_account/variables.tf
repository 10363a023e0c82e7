variable "project" {
  description = "The Google Cloud project."
  type        = string
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.project))
    error_message = "A project is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "name" {
  description = "The account's name before the @."
  type        = string
  default     = "dtrain"
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.name))
    error_message = "An account is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "images" {
  description = "The Artifact Registry repository that holds the image."
  type        = object({ location = string, repository = string })
  default     = null
}

variable "secrets" {
  description = "Secrets of Secret Manager that its machines may read, by name: those of `launch.environment`."
  type        = list(string)
  default     = []
  validation {
    condition     = alltrue([for name in var.secrets : can(regex("^[A-Z][A-Z0-9_]{0,99}$", name))])
    error_message = "A secret is called as its variable: WANDB_API_KEY."
  }
}

variable "keeper" {
  description = "Whether its machines may delete and make machines: `launch` of kind tpu-vm, queued and group, which give themselves back."
  type        = bool
  default     = false
}
