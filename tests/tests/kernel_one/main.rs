//! Tests inside one guest: soft-RoCE devices, client and peer on one kernel. `make kernel-test` runs them.

mod cable;
mod contract;
mod doctor;
mod gate;
mod growth;
mod in_flight;
mod late;
mod limits;
mod no_rdma;
mod order;
mod peers;
mod programs;
mod rails;
mod smoke;
mod speed;
mod stores;
mod v1;
