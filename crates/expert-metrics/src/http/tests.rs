use super::*;

fn server() -> Server {
    let pages = |path: &str| (path == "/page").then(|| Reply::text(200, &"x".repeat(100_000)));
    Server::start("0", Arc::new(pages)).unwrap()
}

fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.local_addr()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    stream
}

/// What comes back for bytes, to the end of the connection.
fn ask(server: &Server, request: &[u8]) -> String {
    let mut stream = connect(server);
    stream.write_all(request).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_page_is_answered_whole_and_the_connection_ends() {
    let server = server();
    assert!(server.local_addr().ip().is_loopback());
    let text = ask(&server, b"GET /page?x=1 HTTP/1.1\r\nHost: a\r\n\r\n");
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("Content-Length: 100001\r\n"), "{head}");
    assert_eq!(body.len(), 100_001);
    let head = ask(&server, b"HEAD /page HTTP/1.0\r\n\r\n");
    assert!(head.contains("Content-Length: 100001\r\n") && head.ends_with("\r\n\r\n"));
}

#[test]
fn what_is_no_request_for_a_page_gets_its_status() {
    let server = server();
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(REQUEST_MAX_BYTES));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(100));
    for (request, status) in [
        (&b"GET /other HTTP/1.1\r\n\r\n"[..], "404"),
        (
            b"POST /page HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
            "405",
        ),
        (b"\x01\x02\r\n\r\n", "400"),
        (b"GET /page\r\n\r\n", "400"),
        (&long.into_bytes(), "431"),
        (many.as_bytes(), "431"),
    ] {
        let text = ask(&server, request);
        assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{text}");
    }
}

#[test]
fn silent_connections_keep_nobody_from_being_answered_and_are_closed_in_time() {
    let server = server();
    let mut silent: Vec<_> = (0..CONNECTIONS_MAX - 1).map(|_| connect(&server)).collect();
    silent[0].write_all(b"GET /pa").unwrap();
    assert!(ask(&server, b"GET /page HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
    // Beyond the limit they wait until the silent ones are closed.
    silent.extend((0..CONNECTIONS_MAX).map(|_| connect(&server)));
    assert!(ask(&server, b"GET /page HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
    for mut stream in silent {
        assert_eq!(stream.read(&mut [0; 16]).unwrap_or(0), 0, "it is closed");
    }
}

#[test]
fn dropping_a_server_ends_it_whoever_is_connected() {
    let server = server();
    let address = server.local_addr();
    let _silent = connect(&server);
    drop(server);
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn an_address_that_cannot_be_read_is_told_apart_from_one_in_use() {
    let pages: Arc<Pages> = Arc::new(|_: &str| None);
    let kind = |address: &str| Server::start(address, pages.clone()).unwrap_err().kind();
    assert_eq!(kind("nonsense"), io::ErrorKind::InvalidInput);
    let server = server();
    let used = server.local_addr().to_string();
    assert_eq!(kind(&used), io::ErrorKind::AddrInUse);
}
