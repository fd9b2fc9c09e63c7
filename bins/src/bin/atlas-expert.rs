//! Tools for expert stores; see `atlas-expert --help`.

fn main() -> std::process::ExitCode {
    atlas_expert::cli::main()
}
