variable "project" {
  description = "The Google Cloud project."
  type        = string
}

variable "name" {
  description = "The name of everything in this stack. A second stack in the project needs another name, and another prefix of the state: terraform init -backend-config=prefix=dtrain/NAME."
  type        = string
  default     = "dtrain-gke"
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

variable "operators" {
  description = "IP ranges from which kubectl may be used, with keys that you choose."
  type        = map(string)
}

variable "tag" {
  description = "The tag of the image."
  type        = string
  default     = "1"
}

variable "slices" {
  description = "The maximum number of slices of 16 chips at the same time."
  type        = number
  default     = 1
}

variable "spot" {
  description = "Whether the chips are spot."
  type        = bool
  default     = true
}

variable "reservation" {
  description = "The reservation to use, by name; set spot=false."
  type        = string
  default     = null
}
