variable "project" {
  description = "The Google Cloud project."
  type        = string
}

variable "bucket" {
  description = "A name for the bucket, unique in the world."
  type        = string
}

variable "operators" {
  description = "Addresses from which kubectl may be used, by a name of your own."
  type        = map(string)
}

variable "region" {
  description = "Of all of it."
  type        = string
  default     = "us-east5"
}

variable "zone" {
  description = "Of the chips, in the region."
  type        = string
  default     = "us-east5-b"
}

variable "slices" {
  description = "Slices of 16 chips that may run at once."
  type        = number
  default     = 1
}

variable "spot" {
  description = "Whether the chips are spot."
  type        = bool
  default     = true
}
