//! temp
#[allow(dead_code)]
mod cable;
mod growth;
mod in_flight;
#[allow(dead_code)]
mod programs;
