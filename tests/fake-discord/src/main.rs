//! `fake-discord [--listen ADDRESS] [--control ADDRESS] [script.toml]`: a fake Discord to point a proxy or a bot at.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use fake_discord::{FakeDiscord, Script, control};
use tokio::net::TcpListener;

const USAGE: &str = "usage: fake-discord [--listen 127.0.0.1:8090] [--control 127.0.0.1:8091] [script.toml]";

struct Arguments {
    listen: SocketAddr,
    control: SocketAddr,
    script: Script,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), String> {
    let arguments = arguments(std::env::args().skip(1))?;
    let listen = arguments.listen;
    let fake = FakeDiscord::listen(arguments.script, listen).await.map_err(|error| format!("{listen}: {error}"))?;
    let control = arguments.control;
    let listener = TcpListener::bind(control).await.map_err(|error| format!("{control}: {error}"))?;
    let control = listener.local_addr().map_err(|error| error.to_string())?;
    println!("fake Discord at {}, control at http://{control}", fake.url());
    tokio::select! {
        () = control::serve(listener, Arc::new(fake)) => Ok(()),
        stopped = tokio::signal::ctrl_c() => stopped.map_err(|error| error.to_string()),
    }
}

fn arguments(mut given: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut arguments = Arguments {
        listen: SocketAddr::from(([127, 0, 0, 1], 8090)),
        control: SocketAddr::from(([127, 0, 0, 1], 8091)),
        script: Script { believable: true, record: 10_000, ..Script::default() },
    };
    let address = |value: Option<String>| {
        let value = value.ok_or(USAGE)?;
        value.parse::<SocketAddr>().map_err(|error| format!("{value}: {error}"))
    };
    while let Some(argument) = given.next() {
        match argument.as_str() {
            "--listen" => arguments.listen = address(given.next())?,
            "--control" => arguments.control = address(given.next())?,
            option if option.starts_with('-') => return Err(USAGE.into()),
            file => {
                let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
                arguments.script = toml::from_str(&text).map_err(|error| format!("{file}: {error}"))?;
            }
        }
    }
    Ok(arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_script_is_read() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/example.toml").to_owned();
        let given = ["--listen".into(), "127.0.0.1:0".into(), file];
        let arguments = arguments(given.into_iter()).unwrap();
        assert_eq!((arguments.listen.port(), arguments.script.rules.len()), (0, 1));
        assert!(super::arguments(["--unknown".into()].into_iter()).is_err());
    }
}
