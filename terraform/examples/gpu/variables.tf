variable "project" {
  description = "The Google Cloud project."
  type        = string
}

variable "name" {
  description = "The name of everything in this stack. A second stack in the project needs another name, and another prefix of the state: terraform init -backend-config=prefix=dtrain/NAME."
  type        = string
  default     = "dtrain-gpu"
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
  default     = "us-east5-a"
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
  description = "The OS Login user to log in as: gcloud compute os-login describe-profile --format 'value(posixAccounts[0].username)'."
  type        = string
}

variable "machine" {
  description = "The machine type of a host."
  type        = string
  default     = "a3-highgpu-8g"
}

variable "hosts" {
  description = "The number of hosts."
  type        = number
  default     = 2
}

variable "spot" {
  description = "Whether the hosts are spot."
  type        = bool
  default     = false
}

variable "reservation" {
  description = "The reservation to use, by name."
  type        = string
  default     = null
}
