//! The real binary.

use std::net::SocketAddr;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::{PATIENCE, eventually};

/// A process of its own, killed when the test ends.
pub struct Process {
    child: Child,
    pub address: SocketAddr,
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Process {
    pub async fn start(upstream: SocketAddr) -> Self {
        Self::start_with(upstream, &[]).await
    }

    /// With these variables too.
    pub async fn start_with(upstream: SocketAddr, variables: &[(&str, &str)]) -> Self {
        let port = free_port();
        let mut child = Command::new(env!("CARGO_BIN_EXE_nirn-proxy"))
            .env_clear()
            .env("BIND_IP", "127.0.0.1")
            .env("PORT", port.to_string())
            .env("ENABLE_METRICS", "false")
            .env("DISCORD_API_URL", format!("http://{upstream}"))
            .envs(variables.iter().copied())
            .current_dir(std::env::temp_dir())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        drain(child.stdout.take().unwrap());
        drain(child.stderr.take().unwrap());
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let process = Self { child, address };
        eventually("the process listens", || std::net::TcpStream::connect(address).is_ok()).await;
        process
    }

    pub fn id(&self) -> u32 {
        self.child.id().unwrap()
    }

    pub async fn signal(&self, name: &str) {
        let arguments = [format!("-{name}"), self.id().to_string()];
        assert!(Command::new("kill").args(arguments).status().await.unwrap().success());
    }

    /// Waits for the end and tells the exit code.
    pub async fn ended(mut self) -> Option<i32> {
        timeout(PATIENCE, self.child.wait()).await.expect("an end in time").unwrap().code()
    }

    /// KiB of memory it holds.
    pub fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// Files and sockets it holds.
    pub fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.id())).unwrap().count()
    }
}

/// Reads to the end, so that the process never waits for a reader.
fn drain(output: impl AsyncRead + Unpin + Send + 'static) {
    tokio::spawn(async move {
        let mut lines = BufReader::new(output).lines();
        while let Ok(Some(_)) = lines.next_line().await {}
    });
}
