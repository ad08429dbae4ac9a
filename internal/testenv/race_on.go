//go:build race

package testenv

// raceEnabled tells whether the tests run with the race detector, which needs a C compiler: the relay
// under test is then built with it too.
const raceEnabled = true
