//! Tests inside one guest: soft-RoCE devices, client and peer on one kernel. `make kernel-test` runs them.

mod smoke;
