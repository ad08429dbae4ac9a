package testenv

import (
	"os/exec"
	"syscall"
)

// dieWithParent has the kernel kill the child when the tests are killed, by go test's own timeout say.
func dieWithParent(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
