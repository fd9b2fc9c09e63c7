//! What `--version` says: the version, and what of this machine the program can use.

use expert_arena::FileQueue;

/// The version of a program and what it found at run time, a line each.
pub(super) fn text(program: &str) -> String {
    format!(
        "{program} {}\nverbs:    {}\nio_uring: {}\n",
        env!("CARGO_PKG_VERSION"),
        verbs(),
        io_uring()
    )
}

fn verbs() -> String {
    match atlas_rdma::devices() {
        Ok(devices) => {
            let names: Vec<&str> = devices.iter().map(|d| d.name.as_str()).collect();
            format!("yes, devices: {}", names.join(", "))
        }
        Err(e) => format!("no: {e}"),
    }
}

fn io_uring() -> String {
    // The smallest one there is: what a kernel or a container refuses, it refuses of this one, too.
    match FileQueue::<()>::new(1, 4096) {
        Ok(_) => "yes".into(),
        Err(e) => format!("no: {e}; files are read by plain reads instead"),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn version_is_followed_by_what_was_found() {
        let text = super::text("atlas-expert");
        let lines: Vec<&str> = text.lines().collect();
        let first = concat!("atlas-expert ", env!("CARGO_PKG_VERSION"));
        assert_eq!(lines[0], first);
        for (line, name) in lines[1..].iter().zip(["verbs: ", "io_uring: "]) {
            let found = line.strip_prefix(name).map(str::trim_start);
            let found = found.is_some_and(|f| f.starts_with("yes") || f.starts_with("no: "));
            assert!(found, "{line}");
        }
        assert_eq!(lines.len(), 3);
    }
}
