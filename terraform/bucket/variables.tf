variable "project" {
  description = "The Google Cloud project."
  type        = string
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.project))
    error_message = "A project is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "name" {
  description = "The name of the bucket, globally unique, without gs://."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9][-_a-z0-9]{1,61}[a-z0-9]$", var.name))
    error_message = "A bucket is 3 to 63 lower-case letters, digits, hyphens and underscores, without gs://."
  }
}

variable "region" {
  description = "The region of the machines that use it, as us-east5: traffic between regions is slow and billed."
  type        = string
  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "A region looks like us-east5; a zone has a letter at the end."
  }
}

variable "labels" {
  description = "Labels for every resource that supports them, such as owner and run: cost reports can be split by them."
  type        = map(string)
  default     = {}
}

variable "create" {
  description = "Whether to create it; false for an existing bucket, such as the one that an earlier `terraform destroy` left."
  type        = bool
  default     = true
}

variable "soft_delete_days" {
  description = "Days for which deleted objects can be restored, and are billed: 0, or 7 to 90."
  type        = number
  default     = 0
  validation {
    condition     = var.soft_delete_days == 0 || (var.soft_delete_days >= 7 && var.soft_delete_days <= 90)
    error_message = "Cloud Storage keeps deleted objects for 0 days, or for 7 to 90."
  }
}

variable "writers" {
  description = "Who may read and write runs, with keys that you choose: serviceAccount:..., user:..."
  type        = map(string)
  default     = {}
  validation {
    condition     = alltrue([for member in values(var.writers) : can(regex("^(serviceAccount|user|group|principal|principalSet):", member))])
    error_message = "A member begins with serviceAccount:, user:, group:, principal: or principalSet:; never allUsers."
  }
}

variable "stack" {
  description = "The name of the stack: its `files` are in launch/STACK/."
  type        = string
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]*$", var.stack))
    error_message = "A stack is lower-case letters, digits and hyphens."
  }
}

variable "files" {
  description = "Local files to copy to launch/STACK/, with keys that you choose: { wheel = \"dist/dtrain-0.1.0-py3-none-any.whl\" }."
  type        = map(string)
  default     = {}
}
