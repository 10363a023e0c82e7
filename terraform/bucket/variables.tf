variable "project" {
  description = "The Google Cloud project."
  type        = string
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.project))
    error_message = "A project is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "name" {
  description = "The bucket's name, unique in the world."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9][-_a-z0-9]{1,61}[a-z0-9]$", var.name))
    error_message = "A bucket is 3 to 63 lower-case letters, digits, hyphens and underscores, without gs://."
  }
}

variable "location" {
  description = "The region of the machines that use it: traffic between regions is slow and is paid for."
  type        = string
}

variable "kept_days" {
  description = "Days for which what was deleted can be had back."
  type        = number
  default     = 7
  validation {
    condition     = var.kept_days >= 7 && var.kept_days <= 90
    error_message = "Google Cloud keeps what was deleted for 7 to 90 days."
  }
}

variable "writers" {
  description = "Who may read, write and delete what is in it, by a name of your own: serviceAccount:..., user:..."
  type        = map(string)
  default     = {}
  validation {
    condition     = alltrue([for member in values(var.writers) : can(regex("^(serviceAccount|user|group|principal|principalSet):", member))])
    error_message = "A member begins with serviceAccount:, user:, group:, principal: or principalSet:; never allUsers."
  }
}
