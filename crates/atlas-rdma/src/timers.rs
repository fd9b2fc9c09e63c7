//! Durations and the numbers that stand for them in packets.

use std::time::Duration;

/// The unit of acknowledge time-outs: 4.096 µs.
const ACK_UNIT: Duration = Duration::from_nanos(4096);

/// The largest code of both kinds: five bits.
const CODE_MAX: u8 = 31;

/// RNR timers in units of 10 µs, by code (InfiniBand specification, table "Encoding for RNR NAK Timer Field"). Code 0,
/// the longest one, stands last here.
const RNR_10_US: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// The code of the shortest acknowledge time-out that is not shorter than this: 4.096 µs · 2^code. Never 0, which would
/// mean to wait for ever; 31 (2.4 hours) for all that is longer.
pub(crate) fn ack_timeout_code(timeout: Duration) -> u8 {
    (1..CODE_MAX)
        .find(|&code| ack_timeout(code) >= timeout)
        .unwrap_or(CODE_MAX)
}

/// The time-out of a code.
pub(crate) fn ack_timeout(code: u8) -> Duration {
    ACK_UNIT * (1 << code.min(CODE_MAX))
}

/// The code of the shortest RNR timer that is not shorter than this; 0 (655 ms) for all that is longer than 492 ms.
pub(crate) fn rnr_timer_code(timer: Duration) -> u8 {
    (1..=CODE_MAX)
        .find(|&code| rnr_timer(code) >= timer)
        .unwrap_or(0)
}

/// The timer of a code.
fn rnr_timer(code: u8) -> Duration {
    Duration::from_micros(10) * RNR_10_US[usize::from(code.min(CODE_MAX))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ack_timeouts_round_up_and_are_never_endless() {
        assert_eq!(ack_timeout_code(Duration::ZERO), 1);
        assert_eq!(ack_timeout_code(Duration::from_nanos(8192)), 1);
        assert_eq!(ack_timeout_code(Duration::from_nanos(8193)), 2);
        assert_eq!(ack_timeout_code(Duration::from_millis(67)), 14);
        assert_eq!(ack_timeout_code(Duration::from_micros(67_109)), 15);
        assert_eq!(ack_timeout_code(Duration::MAX), 31);
        for code in 1..=31 {
            assert_eq!(ack_timeout_code(ack_timeout(code)), code);
        }
    }

    #[test]
    fn rnr_timers_round_up() {
        assert_eq!(rnr_timer_code(Duration::ZERO), 1);
        assert_eq!(rnr_timer_code(Duration::from_micros(640)), 12);
        assert_eq!(rnr_timer_code(Duration::from_micros(641)), 13);
        assert_eq!(rnr_timer_code(Duration::from_secs(5)), 0);
        for code in 1..=31 {
            assert_eq!(rnr_timer_code(rnr_timer(code)), code);
        }
    }
}
