use std::io::{BufReader, Read};

use super::*;

fn error(text: &str) -> String {
    Trace::read(text.as_bytes())
        .expect_err("a bad trace was accepted")
        .to_string()
}

const HEADER: &str =
    r#"{"format":"atlas-routing-trace","version":1,"layers":4,"experts":8,"top_k":2}"#;

#[test]
fn header_is_optional_and_says_what_rows_cannot() {
    let rows = "{\"step\":0,\"layer\":0,\"experts\":[5,1]}\n\n  \r\n{\"step\":0,\"layer\":2,\"experts\":[]}\n{\"step\":7,\"layer\":0,\"experts\":[5]}";
    let bare = Trace::read(rows.as_bytes()).expect("rows alone");
    assert_eq!((bare.layers(), bare.experts(), bare.steps()), (3, 6, 2));
    assert_eq!((bare.uses(), bare.layer_visits()), (3, 3));
    assert_eq!((bare.widest(), bare.distinct_records()), (2, 2));

    let whole = format!("{HEADER}\n{rows}\n");
    let whole = Trace::read(whole.as_bytes()).expect("with a header");
    assert_eq!((whole.layers(), whole.experts()), (4, 8));
    assert_eq!(whole.records(), 32);
}

#[test]
fn header_keeps_what_it_does_not_know_to_itself() {
    let text = format!(
        "{}\n",
        HEADER.replace("\"top_k\"", "\"model\":{\"name\":\"x\"},\"top_k\"")
    );
    let reader = TraceReader::new(text.as_bytes()).expect("a header");
    assert_eq!(reader.header().top_k, Some(2));
}

#[test]
fn bad_lines_are_named_with_what_is_wrong() {
    let row = |step: u64, layer: u32, experts: &str| {
        format!("{{\"step\":{step},\"layer\":{layer},\"experts\":[{experts}]}}")
    };
    let good = row(3, 1, "0,1");
    let with_header = |second: String| format!("{HEADER}\n{second}\n");
    let cases = [
        (String::new(), "no rows"),
        ("\n\n".to_owned(), "no rows"),
        (format!("{HEADER}\n"), "no rows"),
        ("not json".to_owned(), "line 1: expected ident, column 2"),
        ("[1,2]".to_owned(), "line 1: "),
        ("{\"step\":0}".to_owned(), "missing field `layer`"),
        (
            HEADER.replace("-routing", ""),
            "not \"atlas-routing-trace\"",
        ),
        (HEADER.replace(":1,", ":2,"), "version 2 of the format"),
        (HEADER.replace(":8", ":0"), "experts is 0, it is 1 to 65535"),
        (
            HEADER.replace(":4", ":4097"),
            "layers is 4097, it is 1 to 4096",
        ),
        (HEADER.replace(":2}", ":9}"), "top_k is 9, it is 1 to 8"),
        (HEADER.replace(":4", ":-4"), "line 1: "),
        (with_header(HEADER.to_owned()), "line 2: "),
        (
            with_header(row(0, 4, "0")),
            "line 2: layer 4, the header says 4 layers",
        ),
        (
            with_header(row(0, 0, "8")),
            "line 2: expert 8, the header says 8 experts",
        ),
        (
            with_header(row(0, 0, "1,2,3")),
            "3 experts, the header says top_k 2",
        ),
        (row(0, 4096, "0"), "line 1: layer 4096, the limit is 4096"),
        (row(0, 0, "65535"), "expert 65535, the limit is 65535"),
        (row(0, 0, "-1"), "line 1: invalid value: integer `-1`"),
        (row(0, 0, "1,2,1"), "line 1: expert 1 twice"),
        (
            format!("{good}\n{}", row(2, 2, "0")),
            "line 2: step 2 after step 3",
        ),
        (
            format!("{good}\n{}", row(3, 1, "0")),
            "line 2: layer 1 after layer 1 of step 3",
        ),
        (
            format!("{good}\n{}", row(3, 0, "0")),
            "line 2: layer 0 after layer 1 of step 3",
        ),
        (format!("{good}\n\n\n{}", row(3, 0, "0")), "line 4: "),
        (format!("{good} {good}"), "line 1: trailing characters"),
        (
            format!("{}\n{}", row(0, 4095, "0"), row(1, 0, "65534")),
            "line 2: more than 16777216 records",
        ),
    ];
    for (text, want) in cases {
        let error = error(&text);
        assert!(error.contains(want), "{text:?}: {error}");
    }
}

#[test]
fn endless_line_is_refused_after_its_limit() {
    let mut read = 0;
    let endless = std::io::repeat(b'x').take(1 << 40);
    let counted = Counted(endless, &mut read);
    let error = Trace::read(BufReader::with_capacity(4096, counted)).expect_err("endless");
    assert!(
        error
            .to_string()
            .contains("line 1: longer than 65536 bytes")
    );
    assert!(
        read <= LINE_MAX_BYTES as u64 + 2 * 4096,
        "{read} bytes were read"
    );
}

struct Counted<'a, R>(R, &'a mut u64);

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.0.read(into)?;
        *self.1 += read as u64;
        Ok(read)
    }
}

#[test]
fn line_of_the_longest_length_is_read() {
    let row = "{\"step\":0,\"layer\":0,\"experts\":[1]}";
    let text = format!("{row}{}\n", " ".repeat(LINE_MAX_BYTES - row.len() - 1));
    assert_eq!(Trace::read(text.as_bytes()).expect("a row").uses(), 1);
    assert!(error(&format!(" {text}")).contains("longer"));
}

#[test]
fn system_errors_name_the_line() {
    struct Failing;
    impl Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("bad sector"))
        }
    }
    let good = "{\"step\":0,\"layer\":0,\"experts\":[1]}\n";
    let input = BufReader::new(good.as_bytes().chain(Failing));
    let error = Trace::read(input).expect_err("a bad sector");
    assert_eq!(error.to_string(), "line 2: bad sector");
}

proptest! {
    #[test]
    fn what_is_written_is_read_again(rows in rows(), header in any::<bool>()) {
        let mut text = Vec::new();
        let told = Header { layers: Some(3), experts: Some(9), ..Header::default() };
        if header {
            write_header(&mut text, &told).expect("memory");
        }
        for row in &rows {
            write_row(&mut text, row).expect("memory");
        }
        let mut reader = TraceReader::new(&text[..]).expect("a trace");
        prop_assert_eq!(reader.header() == &told, header);
        let mut read = Vec::new();
        while let Some(row) = reader.next_row().expect("a row") {
            read.push(row);
        }
        prop_assert_eq!(&read, &rows);
    }

    #[test]
    fn damaged_text_is_an_error_or_a_trace_and_never_a_panic(
        rows in rows(),
        at in any::<proptest::sample::Index>(),
        bytes in proptest::collection::vec(any::<u8>(), 0..4),
    ) {
        let mut text = Vec::new();
        write_header(&mut text, &Header::default()).expect("memory");
        for row in &rows {
            write_row(&mut text, row).expect("memory");
        }
        let at = at.index(text.len());
        text.splice(at..(at + 1).min(text.len()), bytes);
        if let Ok(trace) = Trace::read(&text[..]) {
            prop_assert!(trace.layer_visits() > 0 && trace.uses() <= text.len() as u64);
        }
    }
}
