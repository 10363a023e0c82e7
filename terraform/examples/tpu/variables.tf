variable "project" {
  description = "The Google Cloud project."
  type        = string
}

variable "name" {
  description = "The name of everything in this stack. A second stack in the project needs another name, and another prefix of the state: terraform init -backend-config=prefix=dtrain/NAME."
  type        = string
  default     = "dtrain-tpu"
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.name))
    error_message = "A name is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "owner" {
  description = "Who is responsible for the cost: the value of the label owner."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9_-]{1,63}$", var.owner))
    error_message = "A label is up to 63 lower-case letters, digits, hyphens and underscores."
  }
}

variable "labels" {
  description = "More labels."
  type        = map(string)
  default     = {}
}

variable "bucket" {
  description = "The name of the bucket of the runs, globally unique."
  type        = string
}

variable "create_bucket" {
  description = "Whether to create it; false for an existing bucket, such as the one that an earlier destroy left."
  type        = bool
  default     = true
}

variable "zone" {
  description = "The zone of the accelerators; everything else is in its region."
  type        = string
  default     = "us-east5-b"
}

variable "hours" {
  description = "Hours after which the machines are deleted; null: never."
  type        = number
  default     = 24
}

variable "wheel" {
  description = "The wheel of dtrain; a local file."
  type        = string
}

variable "lock" {
  description = "The lock file: all packages that the wheel needs, with hashes; a local file."
  type        = string
}

variable "user" {
  description = "The Linux user to log in as."
  type        = string
}

variable "accelerator_type" {
  description = "The slice, as the TPU API names it."
  type        = string
  default     = "v6e-16"
}

variable "spot" {
  description = "Whether the slice is spot."
  type        = bool
  default     = false
}

variable "reserved" {
  description = "Whether the slice comes from the project's reservation."
  type        = bool
  default     = false
}
