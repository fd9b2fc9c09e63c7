//! What a peer shows on its status port.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::SLACK;

/// Status and body of a page.
pub fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("the status port");
    stream.set_read_timeout(Some(SLACK)).expect("a time-out");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").expect("sending");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("headers");
    let status = head.split(' ').nth(1).expect("a status");
    (status.parse().expect("a number"), body.to_owned())
}

/// The value of a metric, whose labels are a part of its name.
pub fn metric(address: SocketAddr, name: &str) -> f64 {
    let (status, page) = get(address, "/metrics");
    assert_eq!(status, 200, "{page}");
    let line = page
        .lines()
        .find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
    let value = line.unwrap_or_else(|| panic!("no {name} in {page}"));
    value.parse().expect("a number")
}
